"""In place of SGLang's kernels that nvcc compiles when they are first called: the same operations
of sgl_kernel, which SGLang itself calls for sizes that those do not take.
"""

from left_out import stand_ins
from sgl_kernel import gelu_and_mul, gelu_tanh_and_mul, silu_and_mul

__all__ = ["gelu_and_mul", "gelu_tanh_and_mul", "silu_and_mul"]
__getattr__ = stand_ins(__name__)
