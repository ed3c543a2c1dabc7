"""The processes of one job: how they find each other, agree, stop together, and learn that one is lost."""
