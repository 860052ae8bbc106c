"""`POST .../topk` and `POST .../infer`, from the bytes of a request to those of its answer."""
