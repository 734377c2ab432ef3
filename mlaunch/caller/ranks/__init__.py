"""Ranks that stay between calls, as their caller has them. ::

Ranks (public) --> RankSet --> RanksLaunch: one launch of them and its calls; a fresh one after it is lost
                                 |-- Driver: who waits for a call drives, a thread while nobody does
                                 +-- KeptHandle --> agent (calls that end badly, output)
                                                --> ranks, past the agent (DirectWays: short calls)

a call: waiting --_advance--> present --over--> settled --tell, without the lock--> its future is done
the ranks: lost --> the present call fails, those that wait move to fresh ranks (carry_on)
"""
