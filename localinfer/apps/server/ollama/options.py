"""Ollama's `options`: those of a reply become the engine's, those of loading are told from what cannot be had."""

from typing import Any, ClassVar

from localinfer.apps.server.replies.fields import GenerationFields
from localinfer.apps.server.transport.http import ApiError, refused_member
from localinfer.apps.server.transport.known_fields import KnownFields, Refusal

_REFUSED = {
    "tfs_z": Refusal("send min_p or typical_p", (1, 0)),
    "penalize_newline": Refusal("send repeat_penalty, which counts new lines as any other token", (True,)),
    "f16_kv": Refusal("start the server with --kv-type", (True,)),
    "logits_all": Refusal("send logprobs beside options", (False,)),
    "vocab_only": Refusal("ask /tokenize for tokens", (False,)),
    "embedding_only": Refusal("ask /api/embed for vectors", (False,)),
}
_OF_LOADING = {
    "rope_frequency_base": Refusal("start the server with --rope-base"),
    "rope_frequency_scale": Refusal("start the server with --rope-frequency-scale"),
}


class Options(GenerationFields, forbid_unknown_fields=True, kw_only=True):
    """Options of a reply: Ollama's, and every other member about sampling and form that this server has elsewhere.

    num_predict: most tokens of the reply; negative: to the end of the context. num_ctx: room for prompt and reply; more
    is given where the model was loaded with more, and an answer says so in `warnings` where it was with less.
    num_batch, num_gpu, main_gpu, num_thread, numa, low_vram, use_mmap, use_mlock, draft_num_predict, num_keep: not
    read, as they change no reply. The others are refused unless their value says what happens anyway.
    """

    known_fields: ClassVar = KnownFields({}, _OF_LOADING)

    num_predict: int | None = None
    num_ctx: int | None = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    main_gpu: Any = None
    num_thread: Any = None
    numa: Any = None
    low_vram: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    draft_num_predict: Any = None
    tfs_z: Any = None
    penalize_newline: Any = None
    f16_kv: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None

    def check(self) -> None:
        """Raise ApiError for an option that cannot be had, with the way out."""
        for name, refusal in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value not in refusal.neutral:
                raise refused_member(f"options.{name}", refusal)
        if self.num_ctx is not None and self.num_ctx < 0:
            raise ApiError(400, f"options.num_ctx is {self.num_ctx}; give tokens, or leave it out", param="num_ctx")

    def engine_options(self) -> dict[str, Any]:
        """The engine's options about sampling and length. Raises: ApiError."""
        self.check()
        if self.num_predict is None:
            return self.sampling_options()
        # Where the server has a limit of its own, it is lifted.
        return {**self.sampling_options(), "max_tokens": None if self.num_predict < 0 else self.num_predict}

    def context_warning(self, context_length: int) -> str | None:
        """What an answer says of a context that is shorter than was asked for; None if it is not."""
        if not self.num_ctx or self.num_ctx <= context_length:
            return None
        return (
            f"num_ctx is {self.num_ctx}, and the model is loaded with a context of {context_length} tokens; longer "
            "prompts are refused: start the server with --context-length for more, as far as the model allows"
        )
