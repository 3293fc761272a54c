"""Pure functions over records: sums, rates and trees; standard library only, but for ``trace``, which needs numpy."""
