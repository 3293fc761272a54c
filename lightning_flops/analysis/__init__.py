"""Pure functions over records: sums, rates and trees; standard library only."""
