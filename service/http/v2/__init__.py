"""The Open Inference Protocol but for `infer`."""
