"""Products of query rows with weight rows, and the vector instructions that make them."""
