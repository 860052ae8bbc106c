"""The doubly sparse layer."""

from trainer.layer.ds_softmax import DSSoftmax as DSSoftmax
from trainer.layer.ds_softmax import Routing as Routing
from trainer.layer.ds_softmax import Teacher as Teacher
