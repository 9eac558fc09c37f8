"""A request that begins with tokens which another process has generated of it already.

The bits of a position depend on the ids before it only, so those tokens are what this engine would choose too. Where
nothing else is wanted of their positions, they are read with the prompt, as the text of a preempted request is. Log
probabilities, and the state of mirostat, are made of the logits of each position: there the tokens are drafted, and the
verification chooses them again.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.request import Request, TokenEvent
from localinfer.engine.runner import shortened
from localinfer.types import FinishReason


def take_up(request: Request, token_ids: NDArray[np.int32], context_length: int) -> None:
    """Let a request, which has not begun, have generated these ids; its reader gets them as events first.

    token_ids: int32[T], of its vocabulary; what follows a token that ends the text is dropped.
    """
    if request.plan.params.logprobs is not None or request.plan.mirostat is not None:
        request.expected = token_ids
        return
    request.grow_history(request.position + token_ids.size)
    request.history[request.position : request.position + token_ids.size] = token_ids
    head, base = request.head, request.base
    for token_id in token_ids.tolist():
        position = request.position
        ending: FinishReason | None = None
        if token_id in request.stops:
            ending = "stop"
        elif position == request.last:
            ending = "length"
        request.events.append(TokenEvent(token_id, position, ending))
        request.position += 1
        if ending is not None:
            request.is_over = True
            return
        if head.size + request.position - base > context_length:
            # The context was shifted here.
            context = np.concatenate((head, request.history[base : request.position]))
            head, base = shortened(context, request.hints, context_length), request.position
            request.record.dropped_tokens += context.size - head.size
    request.restart(np.concatenate((head, request.history[base : request.position])))
    request.is_prompt = True
