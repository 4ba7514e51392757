# Serves a model within a Python program, and asks it with OpenAI's client: one answer, a stream, and embeddings.
# Run it as python serve_and_query.py RUN_OR_MODEL_FOLDER; it needs pip install 'modelwright[serve]' openai.
# The server drains and stops at the end of the block; `modelwright serve` is the same server as a command.
import sys

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam as Question

import modelwright as mw


def main(model: str) -> None:
    question = [Question(role="user", content="Box 7: which color?")]
    with mw.serve(model) as server:
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        answer = client.chat.completions.create(model=server.model_name, messages=question, max_tokens=8, temperature=0)
        print("answer:", answer.choices[0].message.content)
        stream = client.chat.completions.create(
            model=server.model_name, messages=question, max_tokens=8, temperature=0, stream=True
        )
        print("stream:", "".join(event.choices[0].delta.content or "" for event in stream))
        vectors = client.embeddings.create(model=server.model_name, input=["a box", "a color"]).data
        print("embeddings:", [len(vector.embedding) for vector in vectors])


if __name__ == "__main__":
    main(*sys.argv[1:])
