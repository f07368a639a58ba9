//! What comes to its end in each step, and the end of all disturbances.

use super::*;

impl World {
    /// Lets the controller and the broker do what they want to do now.
    pub(super) fn settle(&mut self) {
        self.report_frozen();
        for rounds in 0.. {
            assert!(rounds < 1000, "the controller does not come to rest");
            if (self.controller.next_wakeup()).is_none_or(|at| at > self.now) {
                break;
            }
            self.look();
            let Some(command) = self.controller.poll(self.now) else {
                continue;
            };
            self.seen.commands += 1;
            let group = self.groups.get(&command.control.domain());
            let group = group.unwrap_or_else(|| panic!("control of what is gone: {command:?}"));
            let took = match group.manner {
                Manner::Hangs => {
                    self.seen.late += 1;
                    continue;
                }
                Manner::Works | Manner::Fails => Costs::default().of(command.control),
            };
            self.due(took, Due::Ended(command));
        }
        self.seen.plans = self.controller.plans();
        self.check();
    }

    /// Everything works again and every tenant has work: then everything must come right.
    pub(crate) fn recover(&mut self) {
        self.run_for(self.late.ends);
        for id in self.tenants.keys().copied().collect::<Vec<_>>() {
            self.set_manner(id, Manner::Works);
        }
        for id in self.processes.keys().copied().collect::<Vec<_>>() {
            self.go_on(id);
            self.works(id, true);
        }
        let failed = self.seen.failed + self.seen.late > 0;
        let mends = if failed { DEADLINE + BACKOFF.1 } else { CHECK };
        self.run_for(mends + SOON + SOON + SOON);
        for (id, group) in &self.groups {
            let known = self.controller.domain(*id).expect("it came");
            assert!(!known.is_faulty(), "{id:?} is left alone: {group:?}");
        }
        self.longest_wait = Micros::ZERO;
        (self.groups.values_mut()).for_each(|group| group.waits = None);
    }
}
