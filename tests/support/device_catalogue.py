"""Apple chips and models for the device model: public figures of chips, and configs of models. No formula is here.

Bandwidth and numbers of GPU cores are Apple's. Operations are cores × 128 units × 2 × the clock that is commonly
reported for the generation; Apple does not publish it. From M5 on each core has matrix units.
"""

from .device_model import Chip, Shape

_CORE_FLOPS = {1: 327e9, 2: 358e9, 3: 358e9, 4: 404e9, 5: 420e9}  # one core, by generation
_MATRIX_FACTOR = {5: 3.3}  # of the rate above that products of many tokens reach
_DISPATCH_S = {1: 7.3e-6, 2: 4.5e-6, 3: 4.4e-6, 4: 2.6e-6, 5: 2e-6}
_READ_SHARE, _ULTRA_READ_SHARE = 0.86, 0.76  # an Ultra is two chips
_FIRST_WIDE = 3  # the generation from which on MLX has kernels for quantised products of a few tokens

_BUILDS = {  # generation, GB/s, GPU cores, most GB of memory
    "M1": (1, 68.25, 8, 16),
    "M1 Pro": (1, 200, 16, 32),
    "M1 Max": (1, 400, 32, 64),
    "M1 Ultra": (1, 800, 64, 128),
    "M2": (2, 100, 10, 24),
    "M2 Pro": (2, 200, 19, 32),
    "M2 Max": (2, 400, 38, 96),
    "M2 Ultra": (2, 800, 76, 192),
    "M3": (3, 100, 10, 24),
    "M3 Pro": (3, 150, 18, 36),
    "M3 Max": (3, 400, 40, 128),
    "M3 Ultra": (3, 819, 80, 512),
    "M4": (4, 120, 10, 32),
    "M4 Pro": (4, 273, 20, 64),
    "M4 Max": (4, 546, 40, 128),
    "M5": (5, 153.6, 10, 32),
    "M5 Pro": (5, 307, 20, 64),
    "M5 Max": (5, 614, 40, 128),
}


def _chip(name: str, generation: int, gigabytes_a_second: float, num_cores: int, gigabytes: int) -> Chip:
    flops = _CORE_FLOPS[generation] * num_cores
    matrix_flops = flops * _MATRIX_FACTOR.get(generation, 1.0)
    return Chip(
        name,
        memory_bytes=gigabytes * 10**9,
        bandwidth=gigabytes_a_second * 1e9,
        read_share=_ULTRA_READ_SHARE if name.endswith("Ultra") else _READ_SHARE,
        dispatch_s=_DISPATCH_S[generation],
        vector_flops=flops,
        matrix_flops=matrix_flops,
        tile=64 if generation in _MATRIX_FACTOR else 32,
        has_wide_vectors=generation >= _FIRST_WIDE,
    )


CHIPS = {name: _chip(name, *build) for name, build in _BUILDS.items()}

FOUR, EIGHT, HALF, MXFP4 = 4.5, 8.5, 16.0, 4.25  # bits a weight, in groups of 64 or 32 with their scales

# fmt: off
_SHAPES = (
    Shape(
        name="Qwen3 0.6B", num_layers=28, hidden=1024, num_heads=16, num_kv_heads=8, head_dim=128,
        mlp_width=3072, vocabulary=151936, bits=FOUR,
    ),
    Shape(
        name="Qwen3 4B", num_layers=36, hidden=2560, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_width=9728, vocabulary=151936, bits=FOUR,
    ),
    Shape(
        name="Llama 2 7B", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128,
        mlp_width=11008, vocabulary=32000, bits=FOUR,
    ),
    Shape(
        name="Llama 3.1 8B", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_width=14336, vocabulary=128256, bits=FOUR,
    ),
    Shape(
        name="Qwen3 8B", num_layers=36, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_width=12288, vocabulary=151936, bits=FOUR,
    ),
    Shape(
        name="Qwen3 14B", num_layers=40, hidden=5120, num_heads=40, num_kv_heads=8, head_dim=128,
        mlp_width=17408, vocabulary=151936, bits=FOUR,
    ),
    Shape(
        name="Mistral Small 24B", num_layers=40, hidden=5120, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_width=32768, vocabulary=131072, bits=FOUR,
    ),
    Shape(
        name="Qwen3.8 27B", num_layers=64, hidden=5120, num_heads=24, num_kv_heads=4, head_dim=256,
        mlp_width=17408, vocabulary=248320, bits=FOUR, gated_query=True,
        num_recurrent=48, recurrent_key=2048, recurrent_value=6144, state_bytes=48 * 128 * 128 * 4,
    ),
    Shape(
        name="Qwen3 32B", num_layers=64, hidden=5120, num_heads=64, num_kv_heads=8, head_dim=128,
        mlp_width=25600, vocabulary=151936, bits=FOUR,
    ),
    Shape(
        name="Llama 3.3 70B", num_layers=80, hidden=8192, num_heads=64, num_kv_heads=8, head_dim=128,
        mlp_width=28672, vocabulary=128256, bits=FOUR,
    ),
    Shape(
        name="gpt-oss 20B", num_layers=24, hidden=2880, num_heads=64, num_kv_heads=8, head_dim=64,
        vocabulary=201088, bits=EIGHT, expert_bits=MXFP4, num_experts=32, experts_per_token=4, expert_width=2880,
        num_windowed=12, window=128,
    ),
    Shape(
        name="Qwen3 30B-A3B", num_layers=48, hidden=2048, num_heads=32, num_kv_heads=4, head_dim=128,
        vocabulary=151936, bits=FOUR, num_experts=128, experts_per_token=8, expert_width=768,
    ),
    Shape(
        name="Qwen3.6 35B-A3B", num_layers=40, hidden=2048, num_heads=16, num_kv_heads=2, head_dim=256,
        vocabulary=248320, bits=FOUR, num_experts=256, experts_per_token=8, expert_width=512, shared_width=512,
        gated_query=True, num_recurrent=30, recurrent_key=2048, recurrent_value=4096, state_bytes=32 * 128 * 128 * 4,
    ),
    Shape(
        name="Qwen3-Next 80B-A3B", num_layers=48, hidden=2048, num_heads=16, num_kv_heads=2, head_dim=256,
        vocabulary=151936, bits=FOUR, num_experts=512, experts_per_token=10, expert_width=512, shared_width=512,
        gated_query=True, num_recurrent=36, recurrent_key=2048, recurrent_value=4096, state_bytes=32 * 128 * 128 * 4,
    ),
    Shape(
        name="GLM-4.5-Air 106B", num_layers=46, hidden=4096, num_heads=96, num_kv_heads=8, head_dim=128,
        vocabulary=151552, bits=FOUR, num_experts=128, experts_per_token=8, expert_width=1408, shared_width=1408,
    ),
    Shape(
        name="gpt-oss 120B", num_layers=36, hidden=2880, num_heads=64, num_kv_heads=8, head_dim=64,
        vocabulary=201088, bits=EIGHT, expert_bits=MXFP4, num_experts=128, experts_per_token=4, expert_width=2880,
        num_windowed=18, window=128,
    ),
)
# fmt: on
SHAPES = {shape.name: shape for shape in _SHAPES}
