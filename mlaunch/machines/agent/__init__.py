"""An agent joins the others of its launch, and tells them how its ranks end."""

from mlaunch.machines.agent.joining_machines import join_machines as join_machines
