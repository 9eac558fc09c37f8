"""Convolutions of encoders of sounds: rows of what a kernel covers for products, and kernels of single channels.

A convolution over time, or over time and frequency, is a product of unfolded rows with the kernel as a matrix. One that
keeps channels apart has too little to multiply for that: it is a sum of shifted rows, one tap after the other.
"""

import numpy as np

from localinfer.types import FloatArray


def unfolded_rows(rows: FloatArray, size: int, step: int) -> FloatArray:
    """Rows [ceil(frames / step), size * channels] of frames [frames, channels] around each step-th one, zeros outside.

    size: of the kernel, odd; its taps come in order, each with all channels.
    """
    frames, channels = rows.shape
    before = size // 2
    padded = np.zeros((frames + 2 * before, channels), np.float32)
    padded[before : before + frames] = rows
    count = (frames + 2 * before - size) // step + 1
    result = np.empty((count, size, channels), np.float32)
    for tap in range(size):
        result[:, tap] = padded[tap : tap + step * (count - 1) + 1 : step]
    return result.reshape(count, -1)


def row_kernel(kernel: FloatArray) -> FloatArray:
    """A kernel [out, channels, taps] as a matrix for unfolded rows."""
    return kernel.transpose(0, 2, 1).reshape(len(kernel), -1)


def halved(side: int) -> int:
    """Length of a side after a kernel of 3 with steps of 2 and a zero on either end."""
    return (side + 1) // 2


def _taps(planes: FloatArray) -> list[tuple[int, int, FloatArray]]:
    """Planes [count, time, mel, channels] as each tap of a kernel of 3 x 3 with steps of 2 meets them."""
    count, time, mel, channels = planes.shape
    padded = np.zeros((count, time + 2, mel + 2, channels), np.float32)
    padded[:, 1 : 1 + time, 1 : 1 + mel] = planes
    times, mels = halved(time), halved(mel)
    return [
        (row, column, padded[:, row : row + 2 * times - 1 : 2, column : column + 2 * mels - 1 : 2])
        for row in range(3)
        for column in range(3)
    ]


def unfolded_planes(planes: FloatArray) -> FloatArray:
    """Rows [count * times * mels, 9 * channels] of planes [count, time, mel, channels], for steps of 2."""
    taps = [part for _, _, part in _taps(planes)]
    return np.stack(taps, axis=3).reshape(taps[0].size // planes.shape[3], -1)


def plane_kernel(kernel: FloatArray, *, is_mel_first: bool = False) -> FloatArray:
    """A kernel [out, channels, time, mel] as a matrix for unfolded planes; is_mel_first: of [.., mel, time]."""
    axes = (0, 3, 2, 1) if is_mel_first else (0, 2, 3, 1)
    return kernel.transpose(axes).reshape(len(kernel), -1)


def convolved_planes(planes: FloatArray, kernel: FloatArray, bias: FloatArray) -> FloatArray:
    """Planes [count, times, mels, channels] of each channel with its own kernel [channels, 1, 3, 3], steps of 2."""
    products: list[FloatArray] = [part * kernel[:, 0, row, column] for row, column, part in _taps(planes)]
    result = products[0]
    for product in products[1:]:
        np.add(result, product, out=result)
    return np.add(result, bias, out=result)


def convolved_rows(rows: FloatArray, kernel: FloatArray, before: int) -> FloatArray:
    """Rows [frames, channels] of each channel with its own kernel [channels, taps], `before` taps before the row."""
    frames, taps = len(rows), kernel.shape[1]
    padded = np.zeros((frames + taps - 1, rows.shape[1]), np.float32)
    padded[before : before + frames] = rows
    result: FloatArray = padded[:frames] * kernel[:, 0]
    for tap in range(1, taps):
        np.add(result, padded[tap : tap + frames] * kernel[:, tap], out=result)
    return result
