"""Will it fit? What a step needs and what it costs within a limit, for `offload fit` and `offload.fit`."""
