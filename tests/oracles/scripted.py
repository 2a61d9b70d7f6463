"""A stop policy for tests that need to know what it is asked and told."""

from feather_sglang.scheduling.policies import Action


class Scripted:
    """A policy that answers from a list and notes what it is told."""

    name = "scripted"
    explore = True

    def __init__(self, *answers):
        self.answers = list(answers)
        self.states, self.rewards, self.cancelled = [], [], 0

    def decide(self, state):
        self.states.append(state)
        return self.answers.pop(0) if self.answers else Action.ADD

    def observe(self, reward):
        self.rewards.append(reward)

    def cancel(self):
        self.cancelled += 1

    def end_episode(self):
        self.ended = True
