"""What all tests share: the profiles of hypothesis."""

from tests.support import profiles

profiles.register()
