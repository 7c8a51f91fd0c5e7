"""Jobs that lose ranks and go on: the launcher, and what a rank does when another one is gone.

    launcher    starts the ranks, holds their store, and begins a round whenever a rank is killed
    member      one rank's process: the rank that it has in each round, and a watch over rounds that begin
    survive     train, and train again on the ranks that are left, from the newest copy of the state
    shrink      the mesh of fewer ranks
    ahead       the programs for that mesh, compiled while the job trains

A round is a number in the store, with the list of the processes that take part. In each round these form new process
groups, take their rank from their place in the list, and train from the newest snapshot: a checkpoint in the memory of
the machine, which outlives the processes that wrote it.
"""
