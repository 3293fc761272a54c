"""All private names of torch that we use: ``needed`` by counting, or ``others``, which it can do without."""
