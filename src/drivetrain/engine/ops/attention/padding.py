"""Documents lengthened to few different lengths, where each length costs a kernel that is generated for it.

oneDNN, which computes bf16 products on a CPU, generates machine code for each shape, and packed documents have ever new
lengths. On a Xeon core with AMX, forward and backward of a document of 100 to 900 tokens (8 heads of 64, bf16) took
27 ms of CPU time where its length was new and 16 where it was not, by SDPA and by matrix products alike; restricted to
AVX512_BF16, 37 and 25 by products, 28 and 25 by SDPA; in fp32, 19 both times. 120 packings of 4,096 tokens left 1.4 GB
of generated code behind.

Under a causal mask a token behind the last one changes nothing: no other query sees it, and its own row is cut off.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["frequent_length", "generates_code_for_each_length", "padded"]

_LEAST_STEP = 16
_PER_DOUBLING = 8


def frequent_length(tokens: int) -> int:
    """The least length of few that holds so many tokens: multiples of 16, and 8 from each power of two to the next.

    Up to 2,048 tokens there are 40; at most an eighth is added above 128 tokens, on average a 22nd.
    """
    step = max(_LEAST_STEP, (1 << (max(tokens, 1) - 1).bit_length()) // (2 * _PER_DOUBLING))
    return -(-tokens // step) * step


def padded(x_NLHK: Tensor, length: int) -> Tensor:
    """(N, L, H, K) to (N, length, H, K): zeros behind each document."""
    missing = length - x_NLHK.shape[1]
    return F.pad(x_NLHK, (0, 0, 0, 0, 0, missing)) if missing else x_NLHK


def generates_code_for_each_length(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether torch's own attention does: in bf16 on a CPU with a matrix unit. A graph has its lengths anyway."""
    if torch.compiler.is_compiling() or dtype != torch.bfloat16 or device.type != "cpu":
        return False
    return torch.cpu._is_amx_tile_supported()
