"""What is claimed of CUDA, seen on a real GPU by one command: ``make gpu``, or ``python -m benchmarks.gpu``.

Needs torch and Lightning, and nothing installed: ``PYTHONPATH=. python -m benchmarks.gpu`` works from a plain checkout,
without a network. It takes under nine minutes, prints a page, and on a real GPU writes benchmarks/results/gpu.md.
``--device cpu --small`` runs the same program on a CPU, where what only a GPU can show says so.
"""
