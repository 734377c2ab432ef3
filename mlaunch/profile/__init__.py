"""``profile=``: some steps of some ranks, recorded by torch.profiler, in one file."""
