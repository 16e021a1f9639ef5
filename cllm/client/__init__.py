"""Client of cllm servers with methods of `Engine` (extra `client`)."""

from cllm.errors import extra

with extra("client"):
    from cllm.client.answer_stream import AnswerStream
    from cllm.client.async_client import AsyncClient
    from cllm.client.refusals import ServerError

__all__ = ["AnswerStream", "AsyncClient", "ServerError"]
