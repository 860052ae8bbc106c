"""What most people write first: a FastAPI route with pydantic models around lists of floats."""

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers import answers

answer = answers.load()
app = FastAPI()


class Question(BaseModel):
    inputs: list[list[float]]
    k: int = 10


class Found(BaseModel):
    classes: list[list[int]]
    log_probs: list[list[float]]


@app.post("/topk")
async def topk(question: Question) -> Found:
    classes, log_probs = answer(np.array(question.inputs, np.float32))
    return Found(classes=classes.tolist(), log_probs=log_probs.tolist())
