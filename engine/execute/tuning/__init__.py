"""What is chosen by measuring it on this machine: the search, and the file that keeps what was found."""
