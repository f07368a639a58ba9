//! What keys do: a key and a view give an action.

use gpumux_core::{Class, TenantSpec};
use gpumux_daemon::api::types::{SpecChange, Tenant};
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

use super::view::{Change, Input, Order, Page, View, What};

/// Lines that Page Up and Page Down move by.
const LEAP: usize = 10;

/// Every key, for the help: what to press, and what it does.
pub(super) const HELP: &[(&str, &str)] = &[
    ("↑ ↓ or k j", "choose a tenant; scroll"),
    ("PgUp PgDn", "farther; Home End: first, last"),
    ("Enter", "all about it; back"),
    ("Tab", "GPUs; back to the tenants"),
    ("/", "filter: name, class, state"),
    ("N R W M A", "sort: name, received, waiting,"),
    ("", "memory, age"),
    ("c then l s b", "class: latency, standard, batch"),
    ("+ -", "double or halve the weight"),
    ("z then y", "sleep: memory to the host"),
    ("w", "wake: memory back"),
    ("u", "undo the last change"),
    ("? or F1", "this help; Esc leaves it"),
    ("q or Ctrl-C", "quit"),
];

#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Nothing,
    Quit,
    Change(Box<Change>),
}

impl View {
    pub(super) fn key(&mut self, key: KeyEvent) -> Action {
        let held = key
            .modifiers
            .intersects(KeyModifiers::CONTROL | KeyModifiers::ALT);
        if held {
            return match key.code {
                KeyCode::Char('c') => Action::Quit,
                _ => Action::Nothing,
            };
        }
        self.forget_message();
        match std::mem::take(&mut self.input) {
            Input::Commands => self.command(key.code),
            Input::Filter => {
                self.type_filter(key.code);
                Action::Nothing
            }
            Input::Class(name) => self.choose_class(&name, key.code),
            Input::Sleep(name) => match key.code {
                KeyCode::Char('y') => Action::Change(Box::new(Change {
                    text: format!("`{name}`: its memory moves to the host."),
                    name,
                    what: What::Sleep,
                    inverse: Some(What::Wake),
                })),
                _ => Action::Nothing,
            },
        }
    }

    fn type_filter(&mut self, key: KeyCode) {
        match key {
            KeyCode::Enter => return,
            KeyCode::Esc => return self.filter.clear(),
            KeyCode::Backspace => drop(self.filter.pop()),
            KeyCode::Char(letter) => self.filter.push(letter),
            _ => {}
        }
        self.input = Input::Filter;
    }

    fn choose_class(&self, name: &str, key: KeyCode) -> Action {
        let class = match key {
            KeyCode::Char('l') => Class::Latency,
            KeyCode::Char('s') => Class::Standard,
            KeyCode::Char('b') => Class::Batch,
            _ => return Action::Nothing,
        };
        let Some(tenant) = self.visible().into_iter().find(|it| it.name == name) else {
            return Action::Nothing;
        };
        let set = |class| SpecChange {
            class: Some(class),
            ..SpecChange::default()
        };
        let text = format!(
            "`{name}`: class {} is now {}, also at its next start.",
            tenant.class, class
        );
        change(tenant, set(class), set(tenant.class), text)
    }

    fn weigh(&self, factor: f64) -> Action {
        let Some(tenant) = self.chosen() else {
            return Action::Nothing;
        };
        let (least, most) = (*TenantSpec::WEIGHTS.start(), *TenantSpec::WEIGHTS.end());
        let (was, is) = (
            tenant.spec.weight,
            (tenant.spec.weight * factor).clamp(least, most),
        );
        let set = |weight| SpecChange {
            weight: Some(weight),
            ..SpecChange::default()
        };
        let text = format!(
            "`{}`: weight {was} is now {is}, also at its next start.",
            tenant.name
        );
        change(tenant, set(is), set(was), text)
    }

    fn command(&mut self, key: KeyCode) -> Action {
        let name = self.chosen().map(|it| it.name.clone());
        match key {
            KeyCode::Char('q') => return Action::Quit,
            KeyCode::Char('?') | KeyCode::F(1) => self.turn_to(Page::Help),
            KeyCode::Tab => self.turn_to(Page::Gpus),
            KeyCode::Enter => self.turn_to(Page::Detail),
            KeyCode::Esc if self.page != Page::Tenants => self.turn_to(Page::Tenants),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Char('/') => (self.page, self.input) = (Page::Tenants, Input::Filter),
            KeyCode::Char('A') => self.order = Order::Age,
            KeyCode::Char('N') => self.order = Order::Name,
            KeyCode::Char('R') => self.order = Order::Received,
            KeyCode::Char('W') => self.order = Order::Waiting,
            KeyCode::Char('M') => self.order = Order::Memory,
            KeyCode::Up | KeyCode::Char('k') => self.step(|at| at.saturating_sub(1)),
            KeyCode::Down | KeyCode::Char('j') => self.step(|at| at + 1),
            KeyCode::PageUp => self.step(|at| at.saturating_sub(LEAP)),
            KeyCode::PageDown => self.step(|at| at + LEAP),
            KeyCode::Home => self.step(|_| 0),
            KeyCode::End => self.step(|_| usize::MAX),
            KeyCode::Char('c') => self.input = name.map_or(Input::Commands, Input::Class),
            KeyCode::Char('z') => self.input = name.map_or(Input::Commands, Input::Sleep),
            KeyCode::Char('+' | '=') => return self.weigh(2.0),
            KeyCode::Char('-') => return self.weigh(0.5),
            KeyCode::Char('w') => {
                return name.map_or(Action::Nothing, |name| {
                    Action::Change(Box::new(Change {
                        text: format!("`{name}`: its memory moves back."),
                        name,
                        what: What::Wake,
                        inverse: Some(What::Sleep),
                    }))
                });
            }
            KeyCode::Char('u') => match self.undo.pop() {
                Some(Change {
                    name,
                    inverse: Some(what),
                    ..
                }) => {
                    return Action::Change(Box::new(Change {
                        text: format!("`{name}`: the last change is undone."),
                        name,
                        what,
                        inverse: None,
                    }));
                }
                _ => self.say("There is nothing to undo.".into(), false),
            },
            _ => {}
        }
        Action::Nothing
    }

    /// To a page, or from it back to the tenants.
    fn turn_to(&mut self, page: Page) {
        self.page = if self.page == page {
            Page::Tenants
        } else {
            page
        };
        self.scrolled = 0;
    }

    fn step(&mut self, to: impl Fn(usize) -> usize) {
        if self.page != Page::Tenants {
            // The screen bounds it by what there is.
            self.scrolled = to(self.scrolled.into()).min(u16::MAX.into()) as u16;
            return;
        }
        let shown = self.visible();
        let chosen = self.chosen().map(|it| &it.name);
        let at = shown
            .iter()
            .position(|it| Some(&it.name) == chosen)
            .unwrap_or(0);
        self.name = shown
            .get(to(at).min(shown.len().saturating_sub(1)))
            .map(|it| it.name.clone());
    }
}

fn change(tenant: &Tenant, to: SpecChange, back: SpecChange, text: String) -> Action {
    Action::Change(Box::new(Change {
        name: tenant.name.clone(),
        what: What::Spec(to),
        inverse: Some(What::Spec(back)),
        text,
    }))
}
