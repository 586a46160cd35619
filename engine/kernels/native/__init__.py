"""Native kernels for CPUs in C++, and the library that they are compiled into."""
