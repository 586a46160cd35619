"""Networks in plain torch: the reference against which every faster executor is tested."""
