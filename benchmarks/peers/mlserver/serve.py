"""MLServer: Open Inference Protocol in JSON; the model runs in the server's own process.

    mlserver start FOLDER, where model-settings.json names this class

Rows come as numbers or, by its base64 codec, as the bytes of a float32 array.
"""

from mlserver import MLModel
from mlserver.codecs import Base64Codec, NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers import answers


class TopK(MLModel):
    async def load(self) -> bool:
        self.answer = answers.load()
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = payload.inputs[0]
        if rows.datatype == "BYTES":
            hidden = answers.rows(Base64Codec.decode_input(rows)[0])
            outputs = [Base64Codec.encode_output("found", [answers.joined(self.answer(hidden))])]
        else:
            classes, scores = self.answer(NumpyCodec.decode_input(rows))
            outputs = [
                NumpyCodec.encode_output("classes", classes),
                NumpyCodec.encode_output("scores", scores),
            ]
        return InferenceResponse(model_name=self.name, outputs=outputs)
