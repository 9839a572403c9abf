"""Parameter shapes of well-known models, in registration order; only `math` is needed to use them.

Each generator gives the parameters of one repeated block, as a unit of its own would have them,
and those of the whole model. Sizes follow the published configurations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Shape = tuple[int, ...]
Shapes = list[Shape]


class ModelShapes(NamedTuple):
    block: Shapes
    whole: Shapes


def llama_3_8b() -> ModelShapes:
    """Grouped-query attention and a gated MLP, no biases, separate output head."""
    width, hidden, keys, layers, vocabulary = 4096, 14336, 1024, 32, 128256
    attention = [(width, width), (keys, width), (keys, width), (width, width)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    block: Shapes = [*attention, *mlp, (width,), (width,)]
    return ModelShapes(block, [(vocabulary, width), *block * layers, (width,), (vocabulary, width)])


def qwen2_7b() -> ModelShapes:
    """As Llama, with biases on queries, keys and values, and widths that are not powers of two."""
    width, hidden, keys, layers, vocabulary = 3584, 18944, 512, 28, 152064
    attention: Shapes = []
    for rows in (width, keys, keys):
        attention += [(rows, width), (rows,)]
    mlp = [(hidden, width), (hidden, width), (width, hidden)]
    block: Shapes = [*attention, (width, width), *mlp, (width,), (width,)]
    return ModelShapes(block, [(vocabulary, width), *block * layers, (width,), (vocabulary, width)])


def gpt2() -> ModelShapes:
    """Weights stored as (in, out), biases everywhere, a vocabulary that is odd."""
    width, layers, vocabulary, context = 768, 12, 50257, 1024
    norm: Shapes = [(width,), (width,)]
    block: Shapes = [*norm]
    for rows, columns in ((width, 3 * width), (width, width)):
        block += [(rows, columns), (columns,)]
    block += norm
    for rows, columns in ((width, 4 * width), (4 * width, width)):
        block += [(rows, columns), (columns,)]
    return ModelShapes(block, [(vocabulary, width), (context, width), *block * layers, *norm])


def resnet_50() -> ModelShapes:
    """Convolutions of many row lengths, each with a batch norm; 1000 classes."""

    def convolution(outputs: int, inputs: int, kernel: int) -> Shapes:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]

    whole = convolution(64, 3, 7)
    inputs = 64
    block: Shapes = []
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for position in range(depth):
            block = convolution(width, inputs, 1) + convolution(width, width, 3)
            block += convolution(4 * width, width, 1)
            if position == 0:
                block += convolution(4 * width, inputs, 1)
            whole += block
            inputs = 4 * width
    return ModelShapes(block, [*whole, (1000, inputs), (1000,)])


def convnext_tiny() -> ModelShapes:
    """Depthwise convolutions with rows of 49 beside pointwise ones of up to 3072; layer scale."""
    whole: Shapes = [(96, 3, 4, 4), (96,), (96,), (96,)]
    block: Shapes = []
    previous = 96
    for width, depth in ((96, 3), (192, 3), (384, 9), (768, 3)):
        if width != previous:
            whole += [(previous,), (previous,), (width, previous, 2, 2), (width,)]
        block = [(width, 1, 1), (width, 1, 7, 7), (width,), (width,), (width,)]
        block += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
        whole += block * depth
        previous = width
    return ModelShapes(block, [*whole, (768,), (768,), (1000, 768), (1000,)])


def whisper_small() -> ModelShapes:
    """An encoder behind two 1-D convolutions, and a decoder with cross-attention."""
    width, layers, vocabulary = 768, 12, 51865
    norm: Shapes = [(width,), (width,)]
    square = (width, width)
    attention: Shapes = [square, (width,), square, square, (width,), square, (width,)]
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    encoder_block = attention + norm + mlp + norm
    decoder_block = attention + norm + encoder_block
    whole: Shapes = [(width, 80, 3), (width,), (width, width, 3), (width,), (1500, width)]
    whole += encoder_block * layers + norm
    whole += [(vocabulary, width), (448, width), *decoder_block * layers, *norm]
    return ModelShapes(decoder_block, whole)


def mamba_2_8b() -> ModelShapes:
    """State-space blocks: rows of 4, 16 and 160 beside rows of 5120."""
    width, layers, vocabulary = 2560, 64, 50280
    inner, rank, state = 2 * width, width // 16, 16
    block: Shapes = [
        (inner, state),
        (inner,),
        (2 * inner, width),
        (inner, 1, 4),
        (inner,),
        (rank + 2 * state, inner),
        (inner, rank),
        (inner,),
        (width, inner),
        (width,),
    ]
    return ModelShapes(block, [(vocabulary, width), *block * layers, (width,)])


def moe_128_experts() -> ModelShapes:
    """128 experts of three small matrices each per block; eight blocks of it."""
    width, hidden, experts, layers, vocabulary = 2048, 768, 128, 8, 151936
    attention: Shapes = [(4096, width), (512, width), (512, width), (width, 4096), (128,), (128,)]
    expert: Shapes = [(hidden, width), (hidden, width), (width, hidden)]
    block: Shapes = [*attention, (experts, width), *expert * experts, (width,), (width,)]
    return ModelShapes(block, [(vocabulary, width), *block * layers, (width,), (vocabulary, width)])


MODELS: Mapping[str, ModelShapes] = {
    "Llama-3-8B": llama_3_8b(),
    "Qwen2-7B": qwen2_7b(),
    "GPT-2": gpt2(),
    "ResNet-50": resnet_50(),
    "ConvNeXt-T": convnext_tiny(),
    "Whisper-small": whisper_small(),
    "Mamba-2.8B": mamba_2_8b(),
    "MoE-128": moe_128_experts(),
}
