"""The checks that every load makes: of what is in memory anyway, and of a few blocks of each tensor."""

from collections.abc import Iterator

from localinfer.models.checks.conversion_checks import check_conversion
from localinfer.models.checks.finding import Finding
from localinfer.models.checks.hyperparameter_checks import check_hyperparameters
from localinfer.models.checks.template_checks import check_template_source
from localinfer.models.checks.tensor_samples import check_samples
from localinfer.models.checks.vocabulary_checks import check_beginning, check_vocabulary
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.model_file import ModelFile


def check_settings(
    file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> Iterator[Finding]:
    """Yield what a model's metadata tells. config: with the file's context length."""
    yield from check_hyperparameters(file, config)
    if tokenizer is not None:
        yield from check_text_settings(file, tokenizer, None if config.is_encoder else template)


def check_text_settings(file: ModelFile, tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Finding]:
    """Yield what a vocabulary and a chat template tell; of a template that the user gives nothing: it is theirs."""
    yield from check_vocabulary(tokenizer)
    yield from check_beginning(file, tokenizer, template)
    is_own = "tokenizer.chat_template" not in getattr(file.metadata, "replaced_keys", ())
    if template is not None and is_own:
        yield from check_template_source(template, tokenizer)


def check_loaded(
    file: ModelFile, config: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None
) -> tuple[Finding, ...]:
    """Make all checks of a load, some milliseconds; once the weights were read, their blocks are at hand."""
    return (
        *check_settings(file, config, tokenizer, template),
        *check_samples(file),
        *check_conversion(file, config),
    )
