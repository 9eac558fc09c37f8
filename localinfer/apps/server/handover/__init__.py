"""A prompt handed over: computed by a prefill server, and taken up from the folder that both share."""
