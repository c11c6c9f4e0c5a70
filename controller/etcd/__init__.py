"""The journal and the election of a job whose controllers run on several machines: both in an etcd of the user's."""
