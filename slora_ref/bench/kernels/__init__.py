"""`slora-ref bench kernels`: the LoRA kernels against the memory's limit and the vendor's library.

cases.py needs no GPU; run.py and what it imports need CuPy.
"""
