//! Processes that end, lose their session, or go on.

use super::*;

impl World {
    pub(crate) fn kill(&mut self, process: u64) {
        self.take_out(ProcessId(process));
        self.event(Event::Left(ProcessId(process)));
    }

    /// The session of a process ends, and the process lives: its memory stays where it is, and no work of it is seen.
    pub(crate) fn lose(&mut self, process: u64) -> Puppet {
        let puppet = self.part(process);
        self.event(Event::Lost(ProcessId(process)));
        puppet
    }

    /// A process without a session, of which its broker may not know yet.
    fn part(&mut self, process: u64) -> Puppet {
        let mut puppet = self.take_out(ProcessId(process)).expect("it is there");
        (puppet.closed, puppet.ready) = (false, None);
        puppet.mailbox.clear();
        self.unfreed += puppet.holding.resident();
        self.busy.insert(puppet.tenant, false);
        self.idle_since.insert(puppet.tenant, Micros::ZERO);
        puppet
    }

    /// Its next session begins.
    pub(crate) fn begin_session(&mut self, process: u64, puppet: Puppet) {
        let (id, tenant, holding) = (ProcessId(process), puppet.tenant, puppet.holding);
        self.event(Event::Joined(id, tenant));
        self.unfreed -= holding.resident();
        self.puppets.insert(id, puppet);
        self.event(holds(id, self.capacity, holding));
    }

    /// Another daemon begins, with these tenants, whose processes it does not know yet.
    pub(crate) fn restart(&mut self, tenants: &[u64]) -> Vec<Puppet> {
        let all: Vec<u64> = self.puppets.keys().map(|it| it.0).collect();
        let puppets = all.into_iter().map(|it| self.part(it)).collect();
        self.broker = new_broker(u64::MAX);
        for id in tenants {
            self.terms(*id, Class::Batch, 0);
            self.event(Event::Restored(TenantId(*id)));
        }
        self.measure();
        puppets
    }

    /// A process that its broker does not reach any more, without what it would have answered.
    fn take_out(&mut self, process: ProcessId) -> Option<Puppet> {
        self.queue.retain(|_, due| {
            !matches!(due, Due::Event(Event::Reply(it, ..) | Event::Keeps(it, _) | Event::Holds { process: it, .. })
                | Due::Arrival(
                    Event::Reply(it, ..) | Event::Keeps(it, _) | Event::Holds { process: it, .. }
                    | Event::Ask { process: it, .. } | Event::Received(it, _)
                    | Event::Droppable { process: it, .. })
                | Due::Close(it, ..) | Due::Order(it, ..) | Due::Grant(it, ..) | Due::Moved(it, ..)
                if *it == process)
        });
        self.puppets.remove(&process)
    }

    /// A stopped process goes on, and obeys what it was ordered meanwhile.
    pub(crate) fn wake_up(&mut self, process: u64) {
        let Some(puppet) = self.puppets.get_mut(&ProcessId(process)) else {
            return;
        };
        puppet.manner = Manner::Prompt;
        for (op, order) in std::mem::take(&mut puppet.mailbox) {
            self.deliver(ProcessId(process), op, order);
        }
    }
}
