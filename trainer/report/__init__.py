"""One page about a run or a comparison, with its figures."""
