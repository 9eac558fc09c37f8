"""Compare what this machine's kernels compute with digests of x86-64: a command, for machines of another architecture.

`python -m tests.kernels.cpu.stored_digests` compares products of every layout by one, two and four rows of activations,
optimised as kernels are, of codes of keys and values, and whole kernels of each family, with `digests.txt`; `--write`
writes that file. The result is the same on every instruction set.
"""

import argparse
import hashlib
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from llvmlite import binding as llvm

from localinfer.kernels.jit import compile_ahead, isa
from localinfer.kernels.jit.host import target_cpu, target_features
from localinfer.kernels.jit.numba import optimised
from localinfer.kernels.layouts import PAIRED_LAYOUTS, Layout
from tests.kernels.cpu import digest, run_pieces
from tests.kernels.cpu.emit_assembly import PIECES, made, tile
from tests.kernels.cpu.run_pieces import Piece

STORED = Path(__file__).with_name("digests.txt")
_FAMILIES: dict[str, Callable[[], str]] = {
    "products": digest.products,
    "attention": digest.cached,
    "recurrent": digest.recurrent,
    "encoders": digest.encoded,
    "sampling": digest.chosen,
}


def stored() -> dict[str, str]:
    """Digests by name: of pieces as in `emit_assembly.PIECES`, and of families."""
    lines = STORED.read_text(encoding="utf-8").splitlines()
    return dict(reversed(line.split(maxsplit=1)) for line in lines)


def digests() -> Iterator[tuple[str, str, str]]:
    """Names of what is stored, of what was computed, and its digest."""
    for name, compute in _FAMILIES.items():
        yield name, name, compute()
    target = (isa.SELECTED, llvm.get_process_triple(), target_cpu(), target_features())

    def linked(intrinsic: object, argument_types: list[object]) -> Piece:
        machine, module = made(target, intrinsic, argument_types)
        return run_pieces.linked(str(machine.emit_assembly(optimised(module, machine))), argument_types)

    tiles, quantize = run_pieces.packed_tiles(), linked(*PIECES["quantize"])
    for layout in Layout:
        for rows, gathers in _products_of(layout):
            piece = linked(*tile(layout, rows, gathers=gathers))
            found = run_pieces.tile_product(tiles, layout, piece, rows, quantize)
            yield layout.name, f"{layout.name} by {rows} rows", hashlib.sha256(found).hexdigest()
    for what, run in (("key codes", run_pieces.scored_codes), ("value codes", run_pieces.weighed_codes)):
        for kind in (0, 1):
            name = f"{what} {kind}"
            yield name, name, hashlib.sha256(run(kind, linked(*PIECES[name]))).hexdigest()


def _products_of(layout: Layout) -> list[tuple[int, bool]]:
    """Numbers of rows of a layout's products, and whether these may be any, where products are of pairs."""
    found = [(rows, False) for rows in (1, 2, 4)]
    if isa.pairs_rows() and layout in PAIRED_LAYOUTS:
        found += [(8, False), (2, True), (8, True)]
    return found


def main() -> None:
    """Print what differs, or write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="store the digests of this machine")
    options = parser.parse_args()
    # A child process would import Numba for a kernel or two, which takes minutes where a processor is emulated.
    compile_ahead.can_start_children = lambda: False
    known = {} if options.write else stored()
    found: dict[str, str] = {}
    differing = []
    for name, what, value in digests():
        found.setdefault(name, value)
        if value != known.get(name, found[name]):
            differing.append(what)
    if options.write:
        STORED.write_text("".join(f"{value} {name}\n" for name, value in found.items()), encoding="utf-8")
    differing += sorted(set(known) - set(found))
    print(f"{platform.machine()}, {target_cpu()}, {isa.SELECTED.value}: {len(found)} digests", flush=True)
    if differing:
        sys.exit(f"not those of x86-64: {', '.join(differing)}")


if __name__ == "__main__":
    main()
