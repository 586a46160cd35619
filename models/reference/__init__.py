"""The networks in plain torch: the truth that every faster way is tested against."""
