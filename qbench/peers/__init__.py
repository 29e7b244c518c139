"""Other quantization libraries as variants: each runs its own method, in a process of its own, on the same model and
calibration rows, and its weights are brought into the same comparison.

`methods` says what can be asked of which library, `base` runs it from here, `worker` is what runs in the process, with
a module for each library beside it. A worker imports torch, transformers, safetensors and its library only, so it can
run under another interpreter: some libraries change torch and transformers when they are imported.
"""
