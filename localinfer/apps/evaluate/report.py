"""Results of quantization and comparison, as text and as JSON."""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from localinfer.apps.evaluate.measure import Comparison, Perplexity, SanityAnswer
from localinfer.quant.formats.types import bits_per_weight, block_size
from localinfer.terminal import neutralise_controls

if TYPE_CHECKING:
    from localinfer.quant.pipeline.quantize import QuantizedModel, TensorReport

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_BAR_WIDTH = 40
_DECADES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, math.inf)


def render_quantization(model: "QuantizedModel") -> str:
    """Error and types of each layer, deviations from the preset, and the size."""
    width = max(len(label) for label, _ in _by_layer(model.tensors))
    lines = [f"{'layer':{width}}  error   types"]
    for label, reports in _by_layer(model.tensors):
        lines.append(f"{label:{width}}  {_mean_error(reports)}  {_types(reports)}")
    lines += ["", *_notes(model.tensors)]
    wanted = sum(bits_per_weight(one.choice.wanted) * one.num_weights for one in model.tensors)
    weights = sum(one.num_weights for one in model.tensors)
    asked = (
        f" (the preset alone: {wanted / weights:.2f})" if any(one.choice.is_fallback for one in model.tensors) else ""
    )
    lines.append(
        f"{neutralise_controls(str(model.path))}: {model.num_bytes:,} bytes, "
        f"{model.bits_per_weight:.2f} bits per weight{asked}"
    )
    return "\n".join(lines)


def render_comparison(comparison: Comparison) -> str:
    """The figures of a comparison, and the distribution of divergences."""
    base, candidate = comparison.base, comparison.candidate
    lines = [
        f"{comparison.num_tokens:,} predictions compared, divergence KL(base || candidate) in nats",
        f"  mean       {comparison.mean:.6f} +- {comparison.standard_error:.6f}",
        f"  median     {comparison.quantile(0.5):.6f}",
        f"  99 %       {comparison.quantile(0.99):.6f}",
        f"  99.9 %     {comparison.quantile(0.999):.6f}",
        f"  largest    {comparison.quantile(1):.6f}",
        f"  same likeliest token   {100 * comparison.same_top:.2f} +- {100 * comparison.same_top_standard_error:.2f} %",
        f"  change of the true token's probability   {100 * comparison.probability_change:.2f} % (root mean square)",
        f"  perplexity   {render_perplexity(base)} -> {render_perplexity(candidate)}, "
        f"ratio {candidate.perplexity / base.perplexity:.4f}",
        "",
        *_histogram(comparison),
    ]
    return "\n".join(lines)


def render_summary(comparison: Comparison) -> str:
    """A comparison in one line."""
    return (
        f"KL divergence {comparison.mean:.5f} +- {comparison.standard_error:.5f}, "
        f"same likeliest token {100 * comparison.same_top:.1f} %, perplexity {comparison.base.perplexity:.3f} -> "
        f"{comparison.candidate.perplexity:.3f} ({comparison.num_tokens:,} predictions)"
    )


def render_perplexity(perplexity: Perplexity) -> str:
    """The figure with its standard error."""
    return f"{perplexity.perplexity:.4f} +- {perplexity.standard_error:.4f}"


def render_answers(base: Sequence[SanityAnswer], candidate: Sequence[SanityAnswer]) -> str:
    """Both models' answers to each sanity check, and how many are right."""
    lines = []
    for first, second in zip(base, candidate, strict=True):
        lines.append(first.question.text)
        for label, answer in (("base", first), ("candidate", second)):
            mark = "right" if answer.is_right else "wrong"
            lines.append(f"  {label:9}  {mark}  {neutralise_controls(answer.text).replace(chr(10), ' ')}")
    counts = [sum(answer.is_right for answer in answers) for answers in (base, candidate)]
    lines.append(f"right answers: {counts[0]} -> {counts[1]} of {len(base)}")
    return "\n".join(lines)


def comparison_record(comparison: Comparison) -> dict[str, Any]:
    """The figures by name, for JSON."""
    return {
        "num_tokens": comparison.num_tokens,
        "kl_divergence_nats": {
            "mean": comparison.mean,
            "standard_error": comparison.standard_error,
            "median": comparison.quantile(0.5),
            "p99": comparison.quantile(0.99),
            "p99_9": comparison.quantile(0.999),
            "max": comparison.quantile(1),
        },
        "same_top": comparison.same_top,
        "same_top_standard_error": comparison.same_top_standard_error,
        "probability_change_rms": comparison.probability_change,
        "base": asdict(comparison.base),
        "candidate": asdict(comparison.candidate),
    }


def render_json(record: dict[str, Any]) -> str:
    """One JSON object."""
    return json.dumps(record, indent=2)


def _histogram(comparison: Comparison) -> list[str]:
    lines, below = [], 0
    for limit in _DECADES:
        count = int((comparison.divergences < limit).sum()) - below
        below += count
        share = count / comparison.num_tokens
        label = f"below {limit:g}" if math.isfinite(limit) else "1 and above"
        lines.append(f"  {label:12} {'#' * round(_BAR_WIDTH * share):{_BAR_WIDTH}} {100 * share:5.1f} %")
    return lines


def _by_layer(reports: Iterable["TensorReport"]) -> list[tuple[str, list["TensorReport"]]]:
    """Reports by layer number, after those without a layer by tensor name."""
    groups: dict[str, list[TensorReport]] = {}
    for report in reports:
        if report.relative_error is None and report.num_weights < 1 << 16:
            continue
        match = _LAYER.fullmatch(report.name)
        groups.setdefault(match[1] if match else neutralise_controls(report.name), []).append(report)
    return sorted(groups.items(), key=lambda group: int(group[0]) if group[0].isdecimal() else -1)


def _mean_error(reports: Sequence["TensorReport"]) -> str:
    errors = [(one.relative_error, one.num_weights) for one in reports if one.relative_error is not None]
    weights = sum(weight for _, weight in errors)
    mean = math.sqrt(sum(error**2 * weight for error, weight in errors) / weights) if errors else 0.0
    return f"{mean:.4f}"


def _types(reports: Sequence["TensorReport"]) -> str:
    counts = Counter(report.choice.type.name for report in reports)
    return ", ".join(f"{count} x {type}" if count > 1 else type for type, count in counts.items())


def _notes(reports: Sequence["TensorReport"]) -> list[str]:
    """Lines about tensors that deviate from the preset, grouped."""
    lines = []
    for names, report in _alike(report for report in reports if report.choice.is_fallback):
        wanted, got = report.choice.wanted, report.choice.type
        lines.append(
            f"fallback: {names} became {got.name}, not {wanted.name}: rows of {report.num_columns} are not "
            f"a multiple of {block_size(wanted)}"
        )
    for names, report in _alike(report for report in reports if report.was_quantized_before):
        lines.append(f"quantized twice: {names} was {report.source_type.name}; quantize from F16 or F32 instead")
    if any(report.has_importance for report in reports):
        rounded = [one for one in reports if one.relative_error is not None]
        without = _alike(one for one in rounded if not one.has_importance and not one.is_calibrated)
        lines += [f"no importance: the imatrix has none for {names}" for names, _ in without]
    return lines


def _alike(reports: Iterable["TensorReport"]) -> list[tuple[str, "TensorReport"]]:
    """Tensors grouped by role and types, as "attn_q.weight of 24 layers", with one of each group."""
    groups: dict[tuple[str, str, str, str], list[TensorReport]] = {}
    for report in reports:
        match = _LAYER.fullmatch(report.name)
        role = match[2] if match else report.name
        key = (role, report.choice.wanted.name, report.choice.type.name, report.source_type.name)
        groups.setdefault(key, []).append(report)
    described = []
    for (role, *_), group in groups.items():
        many = f"{role} of {len(group)} layers" if len(group) > 1 else group[0].name
        described.append((neutralise_controls(many), group[0]))
    return described
