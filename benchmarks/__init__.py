"""Long runs whose results stand in README and docs."""
