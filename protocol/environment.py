"""The environment variables through which an agent tells a training process what it is."""

JOB = "MIDSTEP_JOB"
NODE = "MIDSTEP_NODE"
AGENT_SOCKET = "MIDSTEP_AGENT_SOCKET"  # endpoint of the agent's socket for its processors, ipc://...
GENERATION = "MIDSTEP_GENERATION"
INCARNATION = "MIDSTEP_INCARNATION"
CONNECTED = "MIDSTEP_SEATED"  # "1": the world starts together, so the process groups can be built at once
EARLY = "MIDSTEP_EARLY"  # "1": another process holds the rank for now, and speaks in its name
BLACK_BOX_FD = "MIDSTEP_BLACK_BOX_FD"
SETTINGS = "MIDSTEP_SETTINGS"  # JobSettings as JSON
JOB_DIRECTORY = "MIDSTEP_JOB_DIRECTORY"
STORE = "MIDSTEP_STORE"  # host:port of the rendezvous store of the generation
STORE_SECRET = "MIDSTEP_STORE_SECRET"  # of the members of the generation, see Rendezvous
STARTED_S = "MIDSTEP_STARTED_S"  # when the agent began to start the process, on the machine's monotonic clock
PRELOAD = "MIDSTEP_PRELOAD"  # of an agent: what its fork server imports; "store": nothing that only training wants
GRACE_S = "MIDSTEP_GRACE_S"  # of an agent: from SIGTERM to SIGKILL, as its environment has it
MINDIO = "MIDSTEP_MINDIO"  # "1": the program finds a package mindio_ttp, which is midstep's
FAULTS = "MIDSTEP_FAULTS"  # a JSON list of ArmedFault, for tests and demonstrations
# Of a job of several roles, each with a script of its own:
ROLE = "MIDSTEP_ROLE"  # the name of the process's role
ROLES = "MIDSTEP_ROLES"  # how many ranks each role has, as JSON
ROLE_ATTEMPT = "MIDSTEP_ROLE_ATTEMPT"  # how often all roles have been started together
ROLE_STORE = "MIDSTEP_ROLE_STORE"  # the file that says where the store of the roles is
