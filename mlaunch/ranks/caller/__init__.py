"""Ranks that stay between calls, on their caller's side. ::

Ranks (public) --> RankSet --> RanksLaunch: one launch of them and its calls; a new one after it is lost
                                 |-- Driver: a thread that waits for a call drives; a thread of its own if none does
                                 +-- KeptHandle --> agent (calls that end badly, output)
                                                --> ranks, past the agent (DirectWays: short calls)

a call: waiting --_advance--> present --over--> settled --tell, without the lock--> its future is done
the ranks: lost --> the present call fails, those that wait move to new ranks (carry_on)
"""
