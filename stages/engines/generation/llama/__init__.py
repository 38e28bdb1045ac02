"""Decoding for models of the Llama family: plain torch on the CPU, Triton in CUDA graphs on a GPU.

The two compute the same functions (torch_ops.py, kernels.py); a test compares them. It imports what
is shared by all engines (drawing.py, decoding.py, generator.py), and only torch_generator.py
imports it.
"""
