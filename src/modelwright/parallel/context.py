"""Context parallelism: the ranks of one axis share the tokens of each row."""

from modelwright.data.batch import TokenBatch
from modelwright.model.attention import packed_attend
from modelwright.model.decoder import Attend
from modelwright.parallel.mesh import World


def attention_of(part: TokenBatch, context: World) -> tuple[Attend, TokenBatch]:
    """The `Attend` of packed rows, and the tokens of theirs that are this rank's."""
    return packed_attend(part.segments_BT), part
