"""What promises of recall miss, and whether exact answers are exact."""
