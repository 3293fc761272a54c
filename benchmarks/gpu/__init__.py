"""What is claimed of CUDA, seen on a real GPU by one command: ``make gpu``, or ``python -m benchmarks.gpu``.

Needs torch, Lightning and msgspec; without DeepSpeed or transformers what is of them is n/a. ``make gpu-wheels``, on a
machine with a network, fetches what a GPU's machine without one may lack, for ``make gpu`` to find there. It takes
under nine minutes, prints what it sees as it sees it, and after each part, on a real GPU, writes
benchmarks/results/gpu.md. ``--device cpu --small`` runs the same on a CPU, where what only a GPU can show says so.
"""
