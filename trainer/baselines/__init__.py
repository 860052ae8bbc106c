"""What the doubly sparse layer is compared with."""
