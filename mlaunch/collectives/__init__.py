"""What ranks do together, in ranks of mlaunch and of other launchers: exchange objects, form groups, reduce."""
