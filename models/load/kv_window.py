"""Whether `kv_window`, which bounds what texts keep of their keys and values, has an effect on a model."""

from localinfer.errors import RequestError
from localinfer.kernels.kv_layout import KVLayout
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.sparse_attention import index_layers


def reason_without_window(kv_window: int, name: str, config: ModelConfig, kv_layout: KVLayout) -> str | None:
    """Why texts of a model are kept whole all the same, in words; None if they are not.

    name: of the model. config: with the requested context length. Raises: RequestError for a model that has no window.
    """
    if kv_window >= config.context_length:
        return (
            f"kv_window is {kv_window} tokens, but the context ends after {config.context_length}: texts are kept "
            "whole, without a window"
        )
    if not kv_layout.page_bytes + kv_layout.windowed_bytes and not config.is_encoder:
        return f"kv_window has no effect: {name} keeps no keys and values"
    if index_layers(config):
        raise RequestError(
            f"kv_window keeps the pages that get most attention, and a {config.architecture} model itself chooses "
            "what it attends to; leave kv_window out"
        )
    if config.is_encoder:
        raise RequestError("kv_window bounds what generations keep, and an encoder keeps nothing; leave it out")
    return None
