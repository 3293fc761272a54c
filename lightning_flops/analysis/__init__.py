"""Pure functions over records: sums, rates and trees; standard library only, but for numpy and msgspec."""
