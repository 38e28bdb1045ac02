"""A server of OpenEnv for the tests: find a word's letter by letter, drawn from the seed."""

import sys
from random import Random

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

WORDS = ("tiber", "seine", "spree", "volga")


class Guess(Action):
    message: str


class Seen(Observation):
    text: str


class Words(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, **_):
        self.word, self.known = Random(seed).choice(WORDS), set()
        return Seen(text=self._shown())

    def step(self, action, **_):
        if action.message == "crash":
            raise RuntimeError("no more words")
        if action.message == "hang":
            import time

            time.sleep(4000)
        if action.message == self.word:
            return Seen(text=self.word, reward=1, done=True)
        self.known.add(action.message)
        return Seen(text=self._shown())

    @property
    def state(self):
        return State()

    def _shown(self):
        return "".join(letter if letter in self.known else "_" for letter in self.word)


if __name__ == "__main__":
    app = create_fastapi_app(Words, Guess, Seen, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
