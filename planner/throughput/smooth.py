"""The longer of two times that run side by side, without a corner."""

# Sharpness of the corner: at equal times the sum is 2 ** (1 / 4) = 1.19 of one. Qwen-7B with LoRA at 512 tokens, where launches (150 ms) and
# products (about 165 ms) are near each other, takes 187 ms (QwenLM/Qwen, README.md).
SHARPNESS = 4


def either(first_seconds: float, second_seconds: float) -> float:
    """The longer of the two, a little more where they are near: (a^4 + b^4)^(1/4). It grows with both."""
    return float((first_seconds**SHARPNESS + second_seconds**SHARPNESS) ** (1 / SHARPNESS))
