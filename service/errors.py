"""Named failures. Each one's text is a single sentence that is safe to show to a user."""

from enum import Enum, auto
from typing import ClassVar


class Kind(Enum):
    """What a failure is to a client; `http/problems.py` has a status for each."""

    BAD_REQUEST = auto()  # it cannot be read, or asks for what this server does not have
    UNAUTHENTICATED = auto()
    DENIED = auto()
    MISDIRECTED = auto()  # it was meant for another host
    NOT_FOUND = auto()
    NOT_ACCEPTABLE = auto()
    SLOW_REQUEST = auto()
    CONFLICT = auto()
    TOO_LARGE = auto()
    UNSUPPORTED_MEDIA = auto()
    INVALID = auto()  # it can be read, but its values are wrong
    OVERLOADED = auto()
    FAILED = auto()
    UNAVAILABLE = auto()
    TIMEOUT = auto()


class DSSError(Exception):
    """Every failure this project raises on purpose."""

    kind: ClassVar[Kind | None] = None  # None: clients are not told of it


class ModelsFolderMissing(DSSError):
    pass


class NotStarted(DSSError):
    """The server cannot start; the log has said why, most often that the port is taken."""


class NotSupported(DSSError):
    """A protocol has it, and this server does not."""

    kind = Kind.BAD_REQUEST


class NeedsRestart(DSSError):
    """The server ended by itself, because only a restart helps."""


class QueryError(DSSError):
    """The arrays of a query are wrong; nothing was computed."""

    kind = Kind.INVALID


class WrongWidth(QueryError):
    pass


class EmptyBatch(QueryError):
    pass


class NotFinite(QueryError):
    pass


class KOutOfRange(QueryError):
    pass


class ExpertsOutOfRange(QueryError):
    pass


class ModeMalformed(QueryError):
    """exact, recall or rescore is of the wrong type."""


class ModesConflict(QueryError):
    """More than one of exact, recall and rescore was asked for, or experts with one without any."""


class NoHead(QueryError):
    """An exact answer needs the rows of the full softmax."""


class NoContract(QueryError):
    """A promise of recall needs a calibration."""


class RecallOutOfRange(QueryError):
    pass


class RescoreUnsuitable(QueryError):
    pass


class BackendUnsuitable(DSSError):
    """The chosen backend cannot serve such a bundle."""


class BundleError(DSSError):
    """A bundle on disk is refused, or cannot be written."""


class BundleMissing(BundleError):
    pass


class PrecisionUnsuitable(BundleError):
    """The layer cannot be stored in the precision asked for."""


class BundleExists(BundleError):
    pass


class ManifestMalformed(BundleError):
    pass


class ManifestAltered(BundleError):
    pass


class UnknownFormatVersion(BundleError):
    pass


class PathLeavesBundle(BundleError):
    pass


class FileSetWrong(BundleError):
    pass


class FileMissing(BundleError):
    pass


class FileSizeWrong(BundleError):
    pass


class FileUnreadable(BundleError):
    """The system refuses to read a file, or has no memory for it."""


class NoRoom(BundleError):
    """Loading the bundle would take more memory than is left now."""


class ChecksumWrong(BundleError):
    pass


class ArrayMalformed(BundleError):
    pass


class ShapeWrong(BundleError):
    pass


class IndexOutOfRange(BundleError):
    pass


class DuplicateClass(BundleError):
    pass


class LabelsWrong(BundleError):
    pass


class GraphMalformed(BundleError):
    pass


class GraphForbidden(BundleError):
    pass


class WeightsNotFinite(BundleError):
    """An array of the bundle holds a NaN or an infinity."""


class GraphDiffers(BundleError):
    """A graph answers otherwise than the weights it stands for."""


class AnswersNotFinite(BundleError):
    """A bundle that is whole, but whose numbers are of no use."""


class ParityFailed(BundleError):
    """The exported bundle does not answer as the trained layer does."""
